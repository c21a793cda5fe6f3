"""What `--tiny` puts in the place of model, data and GPUs: runs in rehearsals only."""
