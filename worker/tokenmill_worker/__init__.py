"""The service between the queue and the engine: leases, publishes, drains, measures."""
