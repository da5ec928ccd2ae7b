"""Measurements that anybody can repeat from a checkout; not installed with the package."""
