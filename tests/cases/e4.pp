# E4: only the middle stage was given its shapes
group pp = 0-2

r0: send metadata->1; F0; S F0->1
r1: R F0<-0; F0; S F0->2
r2: recv metadata<-1; R F0<-1; F0
