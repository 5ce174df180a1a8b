"""What an instance makes of a problem: base.py, then one file per instance."""
