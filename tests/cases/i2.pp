# I2: a checkpoint thread and the main thread share a group
group pp = 0-1

r0:
  thread { all_gather; signal 0 saved }
  wait signal 0 saved
  barrier
r1:
  thread { wait signal 1 passed; all_gather }
  barrier
  signal 1 passed
