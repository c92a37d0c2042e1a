"""The parts of ShardTensor: the class, its specs, redistribution, and the rules of its operations."""
