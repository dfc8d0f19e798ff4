"""What packages of others bring: every optimizer, metric and kind of model, saved and loaded."""
