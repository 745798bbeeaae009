"""What the runtime asks of the world around a process, one implementation a file."""
