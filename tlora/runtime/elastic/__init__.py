"""Jobs that come and go while a run is at work."""
