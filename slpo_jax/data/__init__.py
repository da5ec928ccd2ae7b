"""Problems, tokens and padded batches."""
