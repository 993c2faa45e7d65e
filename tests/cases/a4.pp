# A4: the receiver waits for something the sender does after its send
group pp = 0-1

r0: S F0->1; signal 1
r1: wait signal 0; R F0<-0; F0
