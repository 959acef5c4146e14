"""The driver, for people and programs: HTTP with an OpenAPI description, and its client."""
