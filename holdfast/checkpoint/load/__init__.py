"""Loading: what ranks request, who reads it, how bytes travel, and where they end."""
