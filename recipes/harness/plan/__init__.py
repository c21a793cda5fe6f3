"""Whether a run will fit, simulated: runs before a run, in a machine that needs neither GPU nor weights."""
