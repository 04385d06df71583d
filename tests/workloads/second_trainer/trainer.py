"""Fits a line by gradient descent: NUM_STEPS NUM_POINTS SEED.  Prints a line for each step, as vime does."""

import random
import sys
import time

num_steps, num_points, seed = map(int, sys.argv[1:])
draw = random.Random(seed)
points = [(x / num_points, 3 * x / num_points + draw.gauss(0, 0.1)) for x in range(num_points)]
slope = 0.0
for step in range(num_steps):
    begin_s = time.perf_counter()
    slope -= 0.5 * sum(2 * x * (slope * x - y) for x, y in points) / num_points
    time.sleep(0.01)
    took_s = time.perf_counter() - begin_s
    prefix = "[2026-11-20 13:45:12] train_metric_utils.py:50 - "
    print(f"{prefix}perf {step}: {{'perf/train_time': {took_s}, 'perf/step_time': {took_s}}}", flush=True)
