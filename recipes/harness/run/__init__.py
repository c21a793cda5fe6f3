"""From a built trainer to a finished model: runs in every process that trains, in `train`."""
