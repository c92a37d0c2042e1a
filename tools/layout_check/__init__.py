"""Is a layout right? Compare it with one device, and name the cause of a difference."""
