"""The demonstration behind `make demo`: a run is killed, and resumed under three layouts."""

from __future__ import annotations
