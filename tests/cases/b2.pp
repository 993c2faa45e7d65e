# B2: a skip connection shares a batch with the edge it jumps over
host blocking
group pp = 0-2

r0: F0; {S F0->1, S skip->2}
r1: {R F0<-0}; F0; {S F0->2}
r2: {R skip<-0, R F0<-1}; F0
