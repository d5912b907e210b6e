"""sglrl behind the interfaces of other projects. Each module needs its project installed."""
