"""Pipeline parallelism: schedules as data, checked, simulated, drawn and run."""
