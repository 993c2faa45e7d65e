# G1: a stage raises, and the others wait
group pp = 0-3

r0:
  step 1F1B n=4 { F0; S F0->1; F1; S F1->1; R B0<-1; B0 }
r1:
  step 1F1B n=4 { R F0<-0; F0 { raise TypeError "no such key" }; S F0->2 }
r2:
  step 1F1B n=4 { R F0<-1; F0; S F0->3 }
r3:
  step 1F1B n=4 { R F0<-2; F0; B0; S B0->2 }
