"""Questions about a run, answered offline from store and plan, or from a checkpoint."""
