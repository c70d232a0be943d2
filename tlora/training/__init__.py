"""The engine: composes nano-batches from many jobs, runs them, and steps each job when its batch is
through."""
