"""What a checkpoint is, asked once, and what a run starts from."""
