"""Run the first process of every pod of a job."""
