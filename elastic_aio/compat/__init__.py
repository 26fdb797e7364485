"""The interfaces of other launchers, over this package's own."""
