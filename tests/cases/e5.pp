# E5: GPipe, S=4, n=1 is right
group pp = 0-3

r0: F0; S F0->1; R B0<-1; B0
r1: R F0<-0; F0; S F0->2; R B0<-2; B0; S B0->0
r2: R F0<-1; F0; S F0->3; R B0<-3; B0; S B0->1
r3: R F0<-2; F0; B0; S B0->2
