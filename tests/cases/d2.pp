# D2: a rank within the group is used as a global rank
group pp0 = 0,2
group pp1 = 1,3

r0: F0; S F0->2
r1: F0; S F0->3
r2: R F0<-0; F0
r3: R F0<-0; F0
