"""Where the facts of inputs meet the plan, before there is a store."""
