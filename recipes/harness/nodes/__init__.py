"""Several machines: runs in the launcher of each, before, while and after its processes train."""
