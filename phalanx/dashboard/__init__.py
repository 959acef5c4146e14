"""The dashboard: one small web application over run folders and the interface of drivers."""
