"""A cluster that is only computed: traces, the simulated executor, what came of a run."""
