"""Accuracy, Pass@k, thresholds, report and figures."""
