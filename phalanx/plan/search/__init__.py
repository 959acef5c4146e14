"""Every layout that a job can have on so many devices, and which of them are fastest, exactly."""
