"""Problems, tokens, padded batches and answers."""
