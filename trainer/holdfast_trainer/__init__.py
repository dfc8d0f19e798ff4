"""The reference models and trainer, apart from the library."""
