"""Pure data that every floor shares: resources of the service, snapshots, sync requests. No I/O."""
