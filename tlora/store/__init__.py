"""What remembers: turns of the control loop, in memory or on disk."""
