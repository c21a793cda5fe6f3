"""What launch.sh does besides training: runs before a run or after it."""
