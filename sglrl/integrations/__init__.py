"""Adapters with which other projects use sglrl. Each module needs its project installed."""
