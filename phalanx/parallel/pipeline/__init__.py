"""Pipeline parallel: stages by cost, tables of who computes what when, their drawing, and what runs them."""
