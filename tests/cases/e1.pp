# E1: only the last rank runs an extra evaluation
group pp = 0-1

r0:
  step GPipe n=1 { F0; S F0->1 }
  barrier
r1:
  step GPipe n=1 { R F0<-0; F0 }
  eval GPipe n=1 { R F0<-0; F0 }
  barrier
