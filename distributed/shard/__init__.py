"""The parts of ShardTensor: its class, its specs, how it is redistributed, and the rules of its operations."""
