"""The faulty machine of a job, found in monitoring data without labels (Minder, arXiv 2411.01791)."""
