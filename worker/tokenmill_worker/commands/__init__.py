"""Commands that this package plugs into `tokenmill`."""
