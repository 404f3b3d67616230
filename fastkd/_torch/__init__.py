"""Fast PyTorch forms of the losses, one file for each loss."""
