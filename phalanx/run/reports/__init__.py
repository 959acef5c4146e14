"""What people see of a job, wherever they look from: the terminal of the driver, another one, or a program."""
