"""From the command line to processes: runs in the launcher, and at the beginning of every process in `parse`."""
