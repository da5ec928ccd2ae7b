"""What the benchmarks share: the work, counts, rates, profiles and reports."""
