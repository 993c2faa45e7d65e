# J1: single ops on three ranks; one send is owed, two ranks wait

r0: S x->1; wait signal 2 never
r1: R x<-0; recv y<-0; S z->2
r2: R z<-1
