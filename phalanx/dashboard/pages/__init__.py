"""A module per page of the dashboard."""
