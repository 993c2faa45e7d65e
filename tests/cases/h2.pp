# H2: a rank is in its data iterator while the next one waits for its step
group pp = 0-1

r0:
  step GPipe n=1 { F0; S F0->1 }
  sleep 600
r1:
  step GPipe n=1 { R F0<-0; F0 }
  step GPipe n=1 { R F0<-0; F0 }
