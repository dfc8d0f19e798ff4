"""Reads formats that other libraries write; nothing in a file is ever executed."""
