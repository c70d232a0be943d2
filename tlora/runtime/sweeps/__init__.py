"""`tlora tune`: sweeps on a real engine. What is decided is decided in `tlora.tuning`."""
