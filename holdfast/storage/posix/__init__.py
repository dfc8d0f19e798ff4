"""Storage in a directory of a POSIX file system."""
